import sys

from torch import nn, tensor


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(128, width), nn.Conv1d(width, width, 3, padding=2)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, 128)

    def forward(self, letters):  # (names, length) -> (names, length, 128)
        mixed = self.mix(self.embedding(letters).transpose(1, 2))[..., :-2]  # causal
        return self.head(self.dropout(mixed.relu()).transpose(1, 2))


class Task:  # predict the next letter of a name; longer names have more letters that count
    def __init__(self, width=64):
        names = [[*map(ord, name)] for name in sorted(sys.stdlib_module_names)]
        self.train_data, self.validation_data = lambda: names[::2] * 8, lambda: names[1::2]
        self.model = lambda: Network(width)

    def weights(self, names):  # known before a batch is read; loss returns the same
        return [len(name) - 1 for name in names]

    def collate(self, names):
        return nn.utils.rnn.pad_sequence([*map(tensor, names)], batch_first=True)

    def loss(self, model, letters):  # focal loss: letters that are predicted well count less
        chances = model(letters[:, :-1]).float().softmax(-1).gather(2, letters[:, 1:, None])
        counts = letters[:, 1:, None] > 0
        return ((1 - chances).square() * -chances.log())[counts].sum(), counts.sum()

    def evaluate(self, model, letters):  # sums, added over the whole validation set
        hits = model(letters[:, :-1]).argmax(-1) == letters[:, 1:]
        return {"hits": hits[letters[:, 1:] > 0].sum(), "letters": (letters[:, 1:] > 0).sum()}

    def metrics(self, sums):
        return {"next_letter_accuracy": sums["hits"] / sums["letters"]}
