"""`SharedKeysValues`: keys and values that layers of one forward share.

Shape legend: T tokens, K key-value heads of this rank, D head size.
"""

from torch import Tensor


class SharedKeysValues:
    """The keys after rotation and the values `[T, K, D]` of the last "store" layer with each window.

    Make one for each forward of a model. Recomputation must get the same object.
    """

    def __init__(self) -> None:
        self._stored: dict[int | None, tuple[Tensor, Tensor]] = {}

    def store(self, window: int | None, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Keep keys and values for later layers with this window."""
        self._stored[window] = k_TKD, v_TKD

    def of(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values for a layer with this window.

        Raises:
            ValueError: No layer of this forward has stored them.
        """
        if window not in self._stored:
            raise ValueError(
                f"no layer with window={window} has stored keys and values in this forward; give all layers of a model "
                "one SharedKeysValues, in their order"
            )
        return self._stored[window]
