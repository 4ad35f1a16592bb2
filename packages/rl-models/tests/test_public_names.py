"""The package's public names."""

import rl_models


def test_every_public_name_is_there() -> None:
    for name in rl_models.__all__:
        assert getattr(rl_models, name) is not None
