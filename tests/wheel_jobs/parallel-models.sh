# The README's program: a model learns, generates and is saved; its folder is loaded again.
python "$JOBS/small_llama.py" checkpoint
python readme.py
python -c 'from parallel_layers import ParallelDims; from parallel_models import *; load_engine("learned", "causal_lm", Grid.build(ParallelDims()), EngineOptions())'
