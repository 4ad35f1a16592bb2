"""The package's public names."""

import pytest

import rl_models


def test_every_public_name_is_there() -> None:
    assert dir(rl_models) == rl_models.__all__
    for name in rl_models.__all__:
        assert getattr(rl_models, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Policy'"):
        rl_models.Policy  # noqa: B018
