"""A small, honest KV cache of three tiers, to look at and to instrument: device, host and disk, and a workload for it.

It stands for an engine of somebody's own. It is not a fast one, but bytes really move and are checked after every
round trip, under write-through or write-back, with evictions, drops under pressure, a storage thread and retractions.
Only `instrument` knows of telemetry; nothing else here imports anything of this package. To read it takes ten minutes,
in this order:

======================== ==================================================================================
`pages`                  a page of tokens: what identifies it, and the bytes that it must have
`memory`                 where pages are: tensors, arrays, plain bytes or a file; pools of them
`tree`                   which prefix is on which tier: a radix tree with locks, and who is to be evicted
`storage`                the disk, and the thread that reads and writes it
`controller`             what moves pages between tiers, evicts them, and loses them
`prefetch`               what has the disk read before a request is admitted
`cache`                  the whole, as a scheduler sees it: submit, admit, extend, finish, retract, restore
`events`, `publisher`    what a router is told of all that, and how
`books`                  what has really happened, counted by the cache itself, and recounted from scratch
`workload`               conversations of many users, that drive the cache as a scheduler would
`instrument`             all of that as metrics, in one page
======================== ==================================================================================

Example:
    >>> from kvcache_otel.demo.cache import TieredCache
    >>> from kvcache_otel.demo.config import Config
    >>> from kvcache_otel.demo.instrument import instrument
    >>> from kvcache_otel.demo.workload import Shape, Workload
    >>> cache = TieredCache(Config(device_tokens=2048, policy="write_back"))
    >>> handle = instrument(cache)  # meter_provider=None: the process's own
    >>> workload = Workload(cache, Shape(users=8, seed=7))
    >>> workload.run(10.0)  # seconds; or workload.step(), as often as one likes
    >>> handle.uninstrument()
    >>> cache.close()
"""
