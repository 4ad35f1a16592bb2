# The README's program on two ranks, and the guide's way to save a run and to resume it on another grid.
torchrun --standalone --nproc-per-node 2 readme.py
torchrun --standalone --nproc-per-node 2 "$JOBS/resume_layers.py" checkpoint
torchrun --standalone --nproc-per-node 1 "$JOBS/resume_layers.py" checkpoint
