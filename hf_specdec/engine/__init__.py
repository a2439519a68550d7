"""The loop: text, schedules, the guard; the only caller of the target's forward."""
