"""One token for each row of logits, and the walk along the drafts."""
