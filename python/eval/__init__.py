"""What ./deeptutor-eval measured, as pages to read; standard task files run through it.

report.py   JSON files of kld, needle, ab and tasks.py -> one HTML file, or Markdown with pictures; or measures first (-m)
tasks.py    LongBench- and RULER-style JSONL with eviction off and on -> scores
plots.py    the plots                page.py   HTML and Markdown
metrics.py  F1, ROUGE-L, exact and substring match
results.py  results, checked and named for a report    command.py  what the commands share
reference.py  kld against a forward pass in numpy

Invariant: nothing here computes attention or eviction; every number comes from the programs, or is a score of their outputs.
"""
