"""The command ``jaxrec tune``, which finds the fastest implementations for a model's shapes.

* `calls`: the calls that a model's tables make.
* `search`: the implementations and options that are timed, and the choice.
* `cli`: the command, its progress and its tables.
"""
