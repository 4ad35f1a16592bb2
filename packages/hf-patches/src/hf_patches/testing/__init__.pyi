from hf_patches.testing.tiny_models import (
    Sample as Sample,
    join_inputs as join_inputs,
    one_by_one as one_by_one,
    random_sample as random_sample,
    random_sequences as random_sequences,
    randomize as randomize,
    tiny_config as tiny_config,
    tiny_model as tiny_model,
)
