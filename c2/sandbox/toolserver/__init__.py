"""The tool server that runs inside a sandbox: standard library only, Python 3.8 or newer.

`server.main(fd)` serves JSON-RPC 2.0 on an inherited socket until the other side closes it; in a
sandbox it is process 1. The package is copied into sandboxes without the rest of c2, hence the
relative imports. The client is `c2.sandbox.client`.
"""
