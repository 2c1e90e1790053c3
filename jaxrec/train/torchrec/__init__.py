"""Models of TorchRec: their state dicts and checkpoints, read and written."""

from jaxrec.train.torchrec.layers import torchrec_layers as torchrec_layers
from jaxrec.train.torchrec.state_dicts import load_torchrec as load_torchrec
from jaxrec.train.torchrec.state_dicts import save_torchrec as save_torchrec
