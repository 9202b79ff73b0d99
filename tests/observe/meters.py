"""What a scraper does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from monarch_async.observe.metrics.serving import Served

__all__ = ["PREFIX", "scrape", "scrape_all", "values"]

PREFIX = "monarch_async_"


async def scrape(url: str, token: str) -> str:
    """The page."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"Authorization": f"Bearer {token}"} if token else {}) as response,
    ):
        assert 200 == response.status
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.text()


async def scrape_all(served: Served) -> str:
    """The page, once all processes answer: what they load for the first answer may take longer than they have for one."""
    async with asyncio.timeout(20):
        while {(): 0} != values(text := await scrape(served.url, served.token), "unreachable_processes"):
            await asyncio.sleep(0.02)
    return text


def values(text: str, name: str) -> Mapping[tuple[str, ...], float]:
    """The samples of this name, by the values of their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name
    }
