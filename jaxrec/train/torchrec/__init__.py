"""Models of TorchRec: their state dicts and checkpoints, read and written."""

from jaxrec.train.torchrec.layers import torchrec_layers as torchrec_layers
from jaxrec.train.torchrec.load import load_torchrec as load_torchrec
from jaxrec.train.torchrec.save import save_torchrec as save_torchrec
