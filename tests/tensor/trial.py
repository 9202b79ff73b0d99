import asyncio
import os
import time

import torch


async def ready(m):
    t = time.monotonic()
    e = await m.comm.ready()
    return e, time.monotonic() - t


async def sums(m):
    x = torch.full((4,), float(m.rank + 1))
    await m.comm.all_reduce(x)
    return x.tolist()


async def bench(m, n):
    x = torch.ones(1)
    g = m.comm.process_group._get_backend(torch.device("cpu"))
    await m.comm.barrier()
    t = time.perf_counter()
    for _ in range(n):
        await m.comm.all_reduce(x)
    a = (time.perf_counter() - t) / n * 1e6
    await m.comm.barrier()
    t = time.perf_counter()
    for _ in range(n):
        await m.comm.barrier()
    c = (time.perf_counter() - t) / n * 1e6

    def plain():
        t = time.perf_counter()
        for _ in range(n):
            g.allreduce([x]).wait()
        return (time.perf_counter() - t) / n * 1e6

    b = await asyncio.to_thread(plain)
    return round(a), round(b), round(c)


async def stack(m):
    return len(os.listdir("/proc/self/task")), m.comm.ledger()[-1]


async def parts(m, n):
    T = []
    g = m.comm.process_group._get_backend(torch.device("cpu"))
    loop = asyncio.get_running_loop()
    x = torch.ones(1)
    res = {}

    async def once(how):
        f = loop.create_future()
        t0 = time.perf_counter()
        w = g.allreduce([x])
        t1 = time.perf_counter()
        if how == "future":

            def cb(fut):
                t2 = time.perf_counter()
                loop.call_soon_threadsafe(lambda: f.set_result(t2))

            w.get_future().add_done_callback(cb)
            t2 = await f
        elif how == "thread":

            def wt():
                w.wait()
                t2 = time.perf_counter()
                loop.call_soon_threadsafe(lambda: f.set_result(t2))

            ex.submit(wt)
            t2 = await f
        t3 = time.perf_counter()
        return (t1 - t0) * 1e6, (t2 - t1) * 1e6, (t3 - t2) * 1e6

    from concurrent.futures import ThreadPoolExecutor

    ex = ThreadPoolExecutor(1)
    for how in ("future", "thread"):
        await m.comm.barrier()
        rows = [await once(how) for _ in range(n)]
        res[how] = [round(sum(c) / n) for c in zip(*rows)]

    async def hop():
        f = loop.create_future()
        t0 = time.perf_counter()
        ex.submit(lambda: loop.call_soon_threadsafe(lambda: f.set_result(None)))
        await f
        return (time.perf_counter() - t0) * 1e6

    rows = [await hop() for _ in range(n)]
    res["hop"] = sum(rows) / n
    return res
