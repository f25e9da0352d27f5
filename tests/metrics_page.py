"""An engine's own ``/metrics``, served by a real HTTP server: a page that a test writes and may take away."""

from __future__ import annotations

from producers.page_server import PageServer


class MetricsPage(PageServer):
    """Answers with ``text`` on loopback; None: no such page. A context manager."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        super().__init__(self._page, "127.0.0.1", 0, "test page", "")

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"{self.root}/metrics"

    def _page(self, path: str) -> bytes | None:
        return self.text.encode() if self.text is not None and path == "/metrics" else None


def vllm_page(started: float = 1_700_000_000.0, running: int = 0, rank: int = 0) -> str:
    """A few of vLLM's metrics of one rank; its process ``started`` then, seconds since the epoch."""
    label = f'{{engine="{rank}",model_name="m"}}'
    return (
        f"process_start_time_seconds {started}\n"
        f"vllm:num_requests_running{label} {running}\n"
        f"vllm:kv_cache_usage_perc{label} 0.25\n"
        f"vllm:prompt_tokens_total{label} 700\n"
    )
