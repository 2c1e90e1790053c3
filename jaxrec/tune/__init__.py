"""The command ``jaxrec tune``: which implementation of the kernels is fastest on one's own shapes.

* `calls`: the calls that a model's tables make.
* `search`: the implementations and options that are timed, and the choice.
* `stopwatch`: the time of a call.
* `cli`: the command, its progress and its tables.
"""
