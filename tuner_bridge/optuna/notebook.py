"""A sweep's page below a cell of a notebook."""

from __future__ import annotations

import json
import sys
from typing import Any

from scheduler.client.connection import SchedulerClient


def page_link(client: SchedulerClient) -> str:
    """Return an address that opens the page once."""
    return f"{client.url}{client.request('POST', '/page/links', {})['path']}"


def in_notebook() -> bool:
    """Tell whether this process shows what it makes in cells, as Jupyter's do."""
    return type(_shell()).__name__ == "ZMQInteractiveShell"


def _shell() -> Any:
    interactive = sys.modules.get("IPython")
    return None if interactive is None else interactive.get_ipython()


FRAME = """<a href={link} target="_blank">open the sweep's page in a tab of its own</a>
<iframe id={name} width="100%" height="{height}" style="border:0"></iframe>
<script>{{
  // Browsers send a page's cookie within a frame only where both are of one host by name.
  const host = location.hostname === "localhost" ? "localhost" : "127.0.0.1";
  document.getElementById({name}).src = {framed}.replace("//127.0.0.1:", `//${{host}}:`);
}}</script>"""


def show_page(client: SchedulerClient, *, height: int = 640) -> None:
    """Show the page below the cell, for a browser on this machine; else a link to the address."""
    from IPython.display import HTML, display

    tab, framed = page_link(client), page_link(client)
    name = f"elastune-{framed[-8:]}"
    html = FRAME.format(link=json.dumps(tab), name=json.dumps(name), framed=json.dumps(framed), height=height)
    display(HTML(html))  # type: ignore[no-untyped-call]  # IPython has no types for them
