"""tulle trains PyTorch models on many processes: for every tensor, where it lives and how it is kept in step."""

from tulle import sync
from tulle.mesh import Mesh, init
from tulle.rows import RowSparse

__version__ = "0.1.0"
