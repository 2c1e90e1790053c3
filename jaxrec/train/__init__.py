"""The training runtime: the step, the loop, checkpoints, the command line."""

from jaxrec.train.model import load_model as load_model
from jaxrec.train.step import compile_step as compile_step
