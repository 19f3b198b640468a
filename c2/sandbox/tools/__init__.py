"""Tools of an agent: one schema each, for prompts and for checks, and what they do.

`calls` has the schemas and `schema` the two ways to read what a model sends; `toolset` answers
calls. `files`, `shell` and `outside` are what tools do: on files (of a sandbox or in memory),
with commands in a sandbox, and on this side of its walls.
"""
