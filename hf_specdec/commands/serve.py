"""`hf-specdec serve`."""

from ..serve.server import ServerOptions, ServeSettings, run_serve


def serve(settings: ServeSettings, server: ServerOptions) -> None:  # type: ignore[valid-type]
    """Serve a model.

    Example:

    hf-specdec serve smollm2 --drafter hub_configs/hybrid --port 8000
    """
    run_serve(settings, server)
