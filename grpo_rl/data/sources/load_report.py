"""What loading a data set found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LoadReport:
    """What became of the rows, of those checked at the start and of those drawn since."""

    num_rows: int
    """Rows in the files, after max_samples."""
    num_checked: int = 0
    """Rows read, rendered and tokenized before the start."""
    num_dropped: int = 0
    """Rows left out because their prompt is longer than max_prompt_length."""
    num_truncated: int = 0
    """Rows whose prompt was cut to max_prompt_length."""
    num_bad: int = 0
    """Rows left out because something is wrong with them (data.on_bad_row=skip)."""
    longest_prompt: int = 0
    """Tokens of the longest prompt as read."""

    def __str__(self) -> str:
        if self.num_checked < self.num_rows:
            text = f"{self.num_rows} rows, {self.num_checked} of them checked and the others when they are drawn; "
            text += f"longest checked prompt {self.longest_prompt} tokens"
        else:
            num_kept = self.num_rows - self.num_dropped - self.num_bad
            text = f"{num_kept} prompts, longest as read {self.longest_prompt} tokens"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_checked} rows dropped as too long"
        if self.num_truncated:
            text += f", {self.num_truncated} prompts cut"
        if self.num_bad:
            text += f", bad rows left out: {self.num_bad}"
        return text
