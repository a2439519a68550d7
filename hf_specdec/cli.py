"""The `hf-specdec` command, for programs that have the package imported; `hf_specdec_cli` says why it is not here."""

from hf_specdec_cli import app

__all__ = ["app"]

if __name__ == "__main__":
    app(prog_name="hf-specdec")
