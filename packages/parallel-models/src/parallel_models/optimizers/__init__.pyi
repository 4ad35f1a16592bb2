from parallel_models.optimizers.interface import Moments as Moments, Optimizer as Optimizer
from parallel_models.optimizers.master_weights import ShardOptimizer as ShardOptimizer
from parallel_models.optimizers.moments import STORAGES as STORAGES
from parallel_models.optimizers.muon import is_hidden_matrix as is_hidden_matrix, orthogonalised as orthogonalised
from parallel_models.optimizers.rules import BUCKET as BUCKET
