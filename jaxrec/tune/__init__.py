"""The search behind ``jaxrec tune``: the fastest implementations for a model's shapes.

* `calls`: the calls that a model's tables make.
* `search`: the timings of implementations and options, and the choice.

`jaxrec.commands.tune` is the command, with its progress and its tables.
"""
