"""A sender that leaves is seen by the peers that wait for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_train.cluster.addresses import listen_on
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, Peer, Rendezvous


class Endless:
    """An operation that does not end, as NCCL's when the sender has left."""

    def is_completed(self) -> bool:
        return False


def test_a_sender_that_leaves_is_seen_before_the_time_limit() -> None:
    listener = listen_on(LOOPBACK)
    rendezvous = Rendezvous("gloo", LOOPBACK, listener.getsockname()[1], 0, 2, 30.0, "key")
    sending, receiving = Peer(rendezvous, listener), Peer(rendezvous._replace(rank=1))
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


def test_a_peer_that_never_comes_is_not_waited_for() -> None:
    """The sender knows that its engine was lost; the other engine hears that the sender has left."""
    listener = listen_on(LOOPBACK)
    rendezvous = Rendezvous("gloo", LOOPBACK, listener.getsockname()[1], 0, 3, 30.0, "key")
    sending, receiving = Peer(rendezvous, listener), Peer(rendezvous._replace(rank=1))
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiving.meet)
        with pytest.raises(BucketMissed):
            sending.meet(lambda: time.monotonic() > begun + 0.2)
        sending.close()
        with pytest.raises(BucketMissed, match="a bucket did not reach all engines: "):
            waiting.result()
    assert time.monotonic() - begun < 5
    receiving.close()
