"""Agents: conversations between a model and the tools of an environment. Imports no jax.

`harness.run` plays one; `agents` are who can speak in it (a local policy, a script, an endpoint),
`chat` is the format in tokens, `trace` what training gets, `transcript` what people get.
"""
