"""A sender that leaves is seen by the peers that wait for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_train.cluster.host import listen_on
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, Peer, Rendezvous


class Endless:
    """An operation that does not end, as NCCL's when the sender has left."""

    def is_completed(self) -> bool:
        return False


def test_a_sender_that_leaves_is_seen_before_the_time_limit() -> None:
    listener = listen_on(LOOPBACK)
    rendezvous = Rendezvous("gloo", LOOPBACK, listener.getsockname()[1], 0, 2, 30.0, "key")
    sending, receiving = Peer(rendezvous, LOOPBACK, listener), Peer(rendezvous._replace(rank=1), LOOPBACK)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(lambda: receiving.wait(receiving.meet()))
        sending.wait(sending.meet())
        waiting.result()
        waiting = threads.submit(receiving.wait, Endless())
        time.sleep(0.1)
        begun = time.monotonic()
        sending.close()
        with pytest.raises(BucketMissed, match="a bucket did not reach all engines: "):
            waiting.result()
        assert time.monotonic() - begun < 5
    receiving.close()
