# The README's program; a patched model is saved and loaded again.
python readme.py
python "$JOBS/reload_patched.py" saved
