"""The merge gate: what is worse than it was, between two reports and two benchmark files.

changes      what a change is, and which of them close the gate
comparable   whether two reports say something about each other
verdicts     from the verdicts of two reports to changes
timings      the same of two files of pytest-benchmark
decision     the command: files in, changes and an exit code out
shown        changes as text and as Markdown
"""
