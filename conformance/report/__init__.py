"""What a run leaves behind: report.json, the terminal's matrix, progress."""
