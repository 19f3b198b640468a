"""The only way out of a sandbox: a gate that lets through what a policy names, and logs the rest.

`policy` says what is legal, `namespace` leads all that a sandbox sends to sockets of the gate, and
`gate` is the process behind them, of which `keeper` is the node's end. README.md lists what has
been tried against it.
"""
