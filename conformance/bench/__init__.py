"""The benchmark: layers of real models, verified at full size before they are timed and after."""
