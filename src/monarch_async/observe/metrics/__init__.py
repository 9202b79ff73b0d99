"""Metrics of a job in the text format of Prometheus; docs/metrics.md is for those who read them.

* `families` says which there are, `counters` is what they are kept in, `inside.metering` keeps those of one process, while somebody asks.
* `collecting` asks all processes and adds up, `rendering` writes it, `serving` is the page.
"""
