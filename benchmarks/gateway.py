"""Draw by concurrent clients of the endpoint (`rl_train.gateway`), beside direct calls of the same engine.

    python benchmarks/gateway.py                                   # 1B shape, 256 clients, the native engine
    python benchmarks/gateway.py --engine vllm
    python benchmarks/gateway.py --tiny                            # 32 clients on a CPU

Each client has a session, and makes four calls of `/inference/v1/generate` one after the other, with token ids in and
out and log-probs; the clients are in other processes. Direct calls make the same requests, as many at a time. Both draw
the same numbers of tokens, different from call to call. Rounds of both take turns after one that is not counted; the
figures are medians.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from measure import CUDA, machine, table, write_json
from rollouts import SHAPE, TINY, write_model

from parallel_models import SamplingOptions

_PROCESSES = 8  # of clients
_CALLS = 4  # of each client


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["native", "vllm"], default="native", help="What draws.")
    parser.add_argument("--clients", type=int, default=256, help="Calls at a time.")
    parser.add_argument("--prompt", type=int, default=128, help="Number of tokens of a prompt.")
    parser.add_argument("--mean", type=int, default=256, help="Mean number of tokens of a response.")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds that are counted.")
    parser.add_argument("--tiny", action="store_true", help="A small model, few clients and tokens.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    # The tied embedding of a random model draws the last token again and again.
    shape = SHAPE | {"tie_word_embeddings": False}
    if args.tiny:
        shape, args.clients, args.prompt, args.mean = {**shape, **TINY, "head_dim": 64}, 32, 8, 24
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape, weights=True)
        write_tokenizer(folder, shape["vocab_size"])
        figures = measure(folder, shape["vocab_size"], args)
    print(json.dumps(machine()))
    rows = [(way, *values.values()) for way, values in figures.items()]
    print(table(("", "seconds", "tokens/s", "share of direct calls"), rows))
    write_json(args.json, engine=args.engine, clients=args.clients, figures=figures)


def measure(folder: Path, vocab_size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of direct calls and of the endpoint."""
    from rl_train.data import Prompt, TextCodec
    from rl_train.engines import InFlightPool, Native, Vllm, processes
    from rl_train.gateway import Gateway, PoolService, Session
    from rl_train.trajectories import Recorder

    longest = args.prompt + 2 * args.mean
    codec, sampling = TextCodec(folder), SamplingOptions(max_new_tokens=2 * args.mean)
    make: Any = partial(Native, str(folder), max_sequences=args.clients, max_length=longest)
    if args.engine == "vllm":
        make = partial(Vllm, str(folder), max_num_seqs=args.clients, max_model_len=longest, memory=0.7)
    pool = InFlightPool(processes(make, ["0" if CUDA else ""]), max_responses=args.clients)
    service = PoolService(pool)
    gateway = Gateway(service, codec, context=longest)
    gateway.start()
    seconds: dict[str, list[float]] = {"direct": [], "endpoint": []}
    total = 0
    try:
        with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as processes_of_clients:
            for number in range(1 + args.rounds):
                calls = calls_of_round(number, vocab_size, args)
                sessions = [
                    gateway.add(Session(Recorder(Prompt([1], {}, 1), codec, longest), sampling))
                    for _ in range(args.clients)
                ]
                keys = [session.key for session in sessions]
                total = sum(length for *_, length in calls)
                for way in seconds:
                    begun = time.perf_counter()
                    if way == "direct":
                        tokens = call_directly(pool, sampling, calls, args.clients)
                    else:
                        shares = [(keys[i::_PROCESSES], calls_of(calls, args.clients, i)) for i in range(_PROCESSES)]
                        works = [processes_of_clients.submit(call_by_clients, gateway.url, *share) for share in shares]
                        tokens = sum(work.result() for work in works)
                    if tokens != total:
                        raise RuntimeError(f"WRONG: {way} has {tokens} tokens in place of {total}")
                    seconds[way].append(time.perf_counter() - begun)
                for session in sessions:
                    gateway.end(session)
    finally:
        gateway.close()
        service.close()
        pool.close()
    medians = {way: statistics.median(each[1:]) for way, each in seconds.items()}
    return {
        way: {"seconds": median, "tokens/s": total / median, "share": medians["direct"] / median}
        for way, median in medians.items()
    }


Calls = list[tuple[list[int], int, int]]  # prompt, seed, tokens of the response


def calls_of_round(number: int, vocab_size: int, args: argparse.Namespace) -> Calls:
    """Return the calls of all clients, with prompts that no other round has; the numbers of tokens are the same."""
    lengths = random.Random(0)
    prompts = random.Random(number)
    return [
        (
            [prompts.randrange(1, vocab_size) for _ in range(args.prompt)],
            prompts.randrange(2**31),
            lengths.randrange(args.mean // 2, 3 * args.mean // 2),
        )
        for _ in range(_CALLS * args.clients)
    ]


def call_directly(pool: Any, sampling: SamplingOptions, calls: Calls, clients: int) -> int:
    """Have the engine draw as many requests at a time as there are clients, and return the number of tokens."""
    from rl_train.engines import Request

    ended, drawings, drawn = SimpleQueue[int](), dict[int, Any](), 0

    def begin(number: int) -> None:
        prompt, seed, length = calls[number]
        limited = replace(sampling, max_length=len(prompt) + length)
        drawings[number] = pool.begin([Request(prompt, seed)], limited, lambda: ended.put(number))

    for number in range(clients):
        begin(number)
    while drawings:
        number = ended.get()
        ((response,),) = drawings.pop(number)()
        drawn += len(response.tokens)
        if number + clients < len(calls):
            begin(number + clients)
    return drawn


def calls_of(calls: Calls, clients: int, process: int) -> list[Calls]:
    """Return the calls of each client of a process."""
    return [calls[client::clients] for client in range(process, clients, _PROCESSES)]


def call_by_clients(url: str, keys: list[str], calls: list[Calls]) -> int:
    """Make the calls of some clients, each with its key, and return the number of tokens."""
    import httpx2

    async def call_all() -> int:
        limits = httpx2.Limits(max_connections=len(keys))
        async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=600, verify=False) as client:

            async def work(key: str, calls_of_client: Calls) -> int:
                drawn = 0
                for prompt, seed, length in calls_of_client:
                    parameters = {"max_tokens": length, "seed": seed, "logprobs": 0}
                    body = {"token_ids": prompt, "sampling_params": parameters}
                    headers = {"authorization": f"Bearer {key}"}
                    reply = await client.post("/inference/v1/generate", json=body, headers=headers)
                    (choice,) = reply.raise_for_status().json()["choices"]
                    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
                    drawn += len(choice["token_ids"])
                return drawn

            return sum(await asyncio.gather(*map(work, keys, calls)))

    return asyncio.run(call_all())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


if __name__ == "__main__":
    main()
