// Trains an n-gram language model on the bytes of a text, by default LICENSE in the current folder:
//
//   train_ngram [file]
//
// x[t] = sum over k of E[k][byte t - k], logits = x W^T: a log-bilinear model (Mnih and Hinton, 2007) without
// positions. One call of linear_cross_entropy gives the gradients of W and x, and holds no logits; the model only
// passes x's gradient on to the embeddings. On the CPU. Returns non-zero unless the model's loss, on text that it has
// not seen, is 0.5 nats below the entropy of single bytes.
#include <eaves/linear_cross_entropy.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int kContext = 4, kFeatures = 32, kClasses = 256;
constexpr int kBatch = 256, kEpochs = 12;
constexpr float kLearningRate = 0.1f;

// Adagrad (Duchi et al., 2011): each number has its own step, which shrinks as its gradients add up.
struct Parameter {
  std::vector<float> value, gradient, squares;

  Parameter(int size, std::mt19937& random) : value(size), gradient(size), squares(size, 1e-8f) {
    std::normal_distribution<float> normal(0, 0.1f);
    for (float& each : value) each = normal(random);
  }

  void step() {
    for (std::size_t i = 0; i < value.size(); ++i) {
      squares[i] += gradient[i] * gradient[i];
      value[i] -= kLearningRate * gradient[i] / std::sqrt(squares[i]);
      gradient[i] = 0;
    }
  }
};

struct Model {
  Parameter embedding, head;  // [kContext, kClasses, kFeatures], [kClasses, kFeatures]

  explicit Model(std::mt19937& random)
      : embedding(kContext * kClasses * kFeatures, random), head(kClasses * kFeatures, random) {}

  // The start of E[k][byte position - 1 - k] in the embedding.
  static int place(const std::vector<unsigned char>& text, int position, int k) {
    return (k * kClasses + text[position - 1 - k]) * kFeatures;
  }

  // The mean loss of predicting the bytes at these positions. Takes a step against its gradient if `learns`.
  float run(const std::vector<unsigned char>& text, const std::vector<int>& positions, bool learns) {
    using eaves::DType;
    using eaves::TensorView;
    const int rows = static_cast<int>(positions.size());
    std::vector<float> hidden(rows * kFeatures), grad_hidden(hidden.size());
    std::vector<std::int32_t> targets(rows);
    for (int row = 0; row < rows; ++row) {
      targets[row] = text[positions[row]];
      for (int k = 0; k < kContext; ++k) {
        const float* e = &embedding.value[place(text, positions[row], k)];
        for (int d = 0; d < kFeatures; ++d) hidden[row * kFeatures + d] += e[d];
      }
    }

    float loss = 0;
    const eaves::LinearCrossEntropyForwardArgs forward = {
        .inputs = {.hidden = TensorView::contiguous(hidden.data(), DType::float32, {rows, kFeatures}),
                   .head = TensorView::contiguous(head.value.data(), DType::float32, {kClasses, kFeatures}),
                   .targets = TensorView::contiguous(targets.data(), DType::int32, {rows})},
        .outputs = {.loss = TensorView::contiguous(&loss, DType::float32, {})}};
    if (!learns) {
      eaves::linear_cross_entropy_forward(forward);
      return loss;
    }
    eaves::linear_cross_entropy_forward_backward(
        {.forward = forward,
         .gradients = {
             .grad_hidden = TensorView::contiguous(grad_hidden.data(), DType::float32, {rows, kFeatures}),
             .grad_head = TensorView::contiguous(head.gradient.data(), DType::float32, {kClasses, kFeatures})}});

    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < kContext; ++k) {
        float* e = &embedding.gradient[place(text, positions[row], k)];
        for (int d = 0; d < kFeatures; ++d) e[d] += grad_hidden[row * kFeatures + d];
      }
    }
    embedding.step();
    head.step();
    return loss;
  }
};

// The loss, in nats, of a model that knows only how frequent each byte is.
double unigram_entropy(const std::vector<unsigned char>& text) {
  std::array<double, kClasses> share = {};
  for (const unsigned char byte : text) share[byte] += 1.0 / static_cast<double>(text.size());
  return -std::accumulate(share.begin(), share.end(), 0.0,
                          [](double sum, double p) { return p > 0 ? sum + p * std::log(p) : sum; });
}

}  // namespace

int main(int count, char** arguments) {
  const char* path = count > 1 ? arguments[1] : "LICENSE";
  std::ifstream file(path, std::ios::binary);
  const std::vector<unsigned char> text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (text.size() < 4096) {
    std::fprintf(stderr, "train_ngram: %s cannot be read, or is shorter than 4096 bytes: name a text file\n", path);
    return 1;
  }

  // Every tenth stretch of 100 bytes is held back.
  std::vector<int> learnt, held_back;
  for (int position = kContext; position < static_cast<int>(text.size()); ++position)
    (position / 100 % 10 == 9 ? held_back : learnt).push_back(position);

  std::mt19937 random(0);
  Model model(random);
  const float before = model.run(text, held_back, false);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    std::shuffle(learnt.begin(), learnt.end(), random);
    double sum = 0;
    for (std::size_t first = 0; first < learnt.size(); first += kBatch) {
      const std::size_t last = std::min(first + kBatch, learnt.size());
      const std::vector<int> batch(learnt.begin() + first, learnt.begin() + last);
      sum += model.run(text, batch, true) * static_cast<double>(batch.size());
    }
    std::printf("epoch %2d: loss %.3f\n", epoch + 1, sum / static_cast<double>(learnt.size()));
  }
  const float after = model.run(text, held_back, false);
  const double entropy = unigram_entropy(text);
  std::printf("text held back: %.3f before, %.3f after; entropy of single bytes %.3f\n", before, after, entropy);
  return after < entropy - 0.5 ? 0 : 1;
}
