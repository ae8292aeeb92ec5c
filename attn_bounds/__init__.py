"""How far can an attention head's output move when its tokens move a little? See README.md."""
