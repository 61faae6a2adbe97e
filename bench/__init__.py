"""Benchmarks: zl beside other servers, over sockets, in alternating rounds. How to run them: docs/benchmarks.md.

`python -m bench.serve` measures serving, `python -m bench.long` what a long prompt does to running streams,
`python -m bench.echo` the load generator itself, `python -m bench.micro.glue` everything that is not the model.
Nothing here is imported by zl or installed with it.
"""
