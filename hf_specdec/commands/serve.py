"""`hf-specdec serve`."""

from ..serving.server import ServerOptions, ServeSettings, run_serve


def serve(settings: ServeSettings, server: ServerOptions) -> None:  # type: ignore[valid-type]
    """Serve a model."""
    run_serve(settings, server)
