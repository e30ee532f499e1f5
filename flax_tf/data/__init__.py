"""From files to batches: documents, tokenizers, the token cache and the order of training."""
