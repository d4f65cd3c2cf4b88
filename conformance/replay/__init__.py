"""What a failure leaves behind, and how it is asked again.

named        a case as JSON, of sizes that the matrix need not have
bundle       the folder: its files, written and read
taken        from a failing case to the tensors of its bundle
source       a `Source` of what a bundle holds
kept         which failures of a run leave a bundle, and the shrunken ones
shrink       the smallest case like it that still fails
again        the command: a bundle judged by a backend
"""
