"""Files: safetensors headers, dtypes, checksums, folders, and saves that appear whole or not at all."""
