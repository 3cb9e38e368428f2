"""How well a drafter drafts: figures from what the server reports per request."""
