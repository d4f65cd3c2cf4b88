"""The judge of QuantCTS: cases, backends, verdicts, reports."""
