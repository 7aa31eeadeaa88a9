"""Additions to the pages of Prefect and MLflow, whose settings have no place for them."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

END_OF_HEAD = b"</head>"

NOT_PASSED_ON = (b"if-none-match", b"if-modified-since", b"accept-encoding")
"""Headers of a request for a page: a page of the browser may lack the addition, and a compressed page gets none."""

PREFECT_ADDITION = b"""
<style>
  .p-toast-container__toast:has(a[href*="app.prefect.cloud"]) { display: none !important; }
</style>
<script>
  new MutationObserver(() => {
    for (const label of document.querySelectorAll(".schema-form-property__label, label")) {
      const text = [...label.childNodes].find(node => node.nodeType === 3 && node.nodeValue.endsWith(" (Optional)"));
      const property = text && (label.closest(".schema-form-property") || label.parentElement);
      if (property && property.textContent.includes("; required")) {
        text.nodeValue = text.nodeValue.replace(" (Optional)", "");
      }
    }
  }).observe(document, { childList: true, subtree: true });
</script>
"""
"""Prefect's pages without an advertisement in place of an error before the login, and without "(Optional)" beside a
setting that is required."""

MLFLOW_ADDITION = b"""
<style>
  [data-assistant-ui], aside > div:has(> [role="button"]), [data-component-id="mlflow.home.telemetry-alert"] {
    display: none !important;
  }
</style>
<script>
  localStorage.setItem("mlflow.workflowType_v1", JSON.stringify("machine_learning"));
  localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
  localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
</script>
"""
"""MLflow's menu is that of model training, without the Assistant and the choice of another menu: neither is served.

Nor is there a message about telemetry, which is switched off.
"""


class WithAddition:
    """ASGI middleware that adds a text to the head of an application's page."""

    def __init__(self, app: ASGIApp, addition: bytes) -> None:
        """Wrap an application.

        Args:
            app: The application.
            addition: HTML of the head.
        """
        self._app = app
        self._addition = addition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and add the text to a response that is a page."""
        if scope["type"] != "http" or not _is_page(scope):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def add(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                # A file of a run is offered as a download, and stays as it is.
                is_file = headers.get("content-disposition", "").startswith("attachment")
                if headers.get("content-type", "").startswith("text/html") and not is_file:
                    start = message
                    return
            elif start is not None:
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                page = bytes(body).replace(END_OF_HEAD, self._addition + END_OF_HEAD, 1)
                headers = MutableHeaders(raw=start["headers"])
                headers["content-length"] = str(len(page))
                for name in ("etag", "last-modified"):
                    del headers[name]
                await send(start)
                message = {"type": "http.response.body", "body": page}
            await send(message)

        passed_on = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
        await self._app({**scope, "headers": passed_on}, receive, add)


def _is_page(scope: Scope) -> bool:
    """Return whether a browser asks for a page, and not for one of its parts."""
    accepted = [value for name, value in scope["headers"] if name == b"accept"]
    return scope["method"] == "GET" and any(value.startswith(b"text/html") for value in accepted)
