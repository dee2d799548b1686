-- tokens: one row a token of the train rollouts. Columns as in tokens_all.
SELECT * FROM tokens_all WHERE split = 'train'
