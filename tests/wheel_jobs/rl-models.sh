# Two steps of the README's program on four ranks; what it has learned is loaded, trained, saved and resumed.
sed -i 's/range(50)/range(2)/' readme.py
torchrun --standalone --nproc-per-node 4 readme.py
python "$JOBS/resume_actor.py" learned run
