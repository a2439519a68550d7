"""`hf-specdec train disco`."""

from typer import echo

from ..training import disco


def train_disco(settings: disco.TrainSettings) -> None:
    """Train a classifier, and say how good it is."""
    report = disco.train_disco(settings)
    for name in ("greedy", "sampled"):
        quality, choice = report[name]["quality"], report[name]["choices"][0]
        echo(
            f"{name}: F1 {quality['f1']:.3f} (always accepting: {quality['f1_always']:.3f}), calibration error "
            f"{quality['calibration_error']:.3f}, rule {choice['rule']}, τ {choice['tau']}, SLmax {choice['longest']}"
        )
    echo(f"saved to {settings.output}")
