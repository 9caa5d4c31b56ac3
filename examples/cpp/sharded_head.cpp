// A head whose vocabulary is cut over ranks (tensor parallel), in a trainer that communicates by itself: each rank has
// all of x and some classes of the head, and sends 10 numbers for each row in place of its logits. Threads stand for
// ranks here and shared memory for NCCL, on the CPU. Prints the loss, and how far it and the gradients are from those
// of one rank; returns non-zero where that is more than float32 rounds, or where ranks do not agree to the bit.
#include <eaves/cross_entropy.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace {

using eaves::TensorView;

constexpr int kRows = 64, kFeatures = 32, kClasses = 1000, kStatistics = eaves::kCrossEntropyStatistics;
constexpr eaves::CrossEntropyOptions kOptions = {.label_smoothing = 0.1, .z_loss_weight = 1e-4};

TensorView view(float* data, const eaves::Dims& shape) {
  return TensorView::contiguous(data, eaves::DType::float32, shape);
}

// What every rank has: x, and targets that count over the whole vocabulary.
struct Batch {
  std::vector<float> x;  // [kRows, kFeatures]
  std::vector<std::int64_t> targets;

  TensorView targets_view() const { return TensorView::contiguous(targets.data(), eaves::DType::int64, {kRows}); }
};

// What one rank has of the head: `stored` rows, the first of them `classes` classes, the others padding.
struct Shard {
  int first_class, classes, stored;
  std::vector<float> head = {};  // [stored, kFeatures]
  float loss = 0;
  std::vector<float> grad_head = std::vector<float>(stored * kFeatures);
  std::vector<float> grad_x = std::vector<float>(kRows * kFeatures);

  // x head^T: [kRows, stored], with the padding, as one product gives them.
  std::vector<float> logits_of(const Batch& batch) const {
    std::vector<float> logits(kRows * stored);
    for (int row = 0; row < kRows; ++row) {
      const float* features = &batch.x[row * kFeatures];
      for (int v = 0; v < stored; ++v)
        logits[row * stored + v] = std::inner_product(features, features + kFeatures, &head[v * kFeatures], 0.0f);
    }
    return logits;
  }

  // What the loss sees of them: without the padding, which the stride from row to row leaps over.
  TensorView view_of(std::vector<float>& logits) const {
    return TensorView::strided(logits.data(), eaves::DType::float32, {kRows, classes}, {stored, 1});
  }

  // In the padding's columns grad_logits is no gradient: they are left out, and grad_head is 0 there.
  void add_gradients(const Batch& batch, const std::vector<float>& grad_logits) {
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < classes; ++v) {
        const float dz = grad_logits[row * stored + v];
        for (int d = 0; d < kFeatures; ++d) {
          grad_head[v * kFeatures + d] += dz * batch.x[row * kFeatures + d];
          grad_x[row * kFeatures + d] += dz * head[v * kFeatures + d];
        }
      }
    }
  }
};

// Every rank calls the same functions in the same order.
class Communicator {
 public:
  explicit Communicator(int ranks) : parts_(ranks), barrier_(ranks) {}

  // ncclAllGather: the parts of all ranks, one behind the other in rank order.
  void all_gather(int rank, std::span<const float> part, std::span<float> all) {
    parts_[rank] = part;
    barrier_.arrive_and_wait();  // from here on the parts of all are known
    for (std::size_t i = 0; i < parts_.size(); ++i) std::ranges::copy(parts_[i], all.begin() + i * part.size());
    barrier_.arrive_and_wait();  // until here others may read `part`
  }

  // ncclAllReduce with ncclSum, in place; here in rank order, so that every run gives the same bits.
  void all_reduce(int rank, std::span<float> sum) {
    std::vector<float> all(parts_.size() * sum.size());
    all_gather(rank, sum, all);
    std::ranges::fill(sum, 0.0f);
    for (std::size_t i = 0; i < all.size(); ++i) sum[i % sum.size()] += all[i];
  }

 private:
  std::vector<std::span<const float>> parts_;
  std::barrier<> barrier_;
};

// One step of one rank. Options and the number of classes are the same in the three calls, and on all ranks.
void run_rank(Communicator& communicator, int rank, int ranks, const Batch& batch, Shard& shard) {
  const eaves::ExecutionContext context = {.threads = 1};  // ranks share the cores; on a GPU: .stream, NCCL's
  std::vector<float> logits = shard.logits_of(batch);
  std::vector<float> part(kRows * kStatistics), all(ranks * part.size()), lse(kRows);
  float grad_loss = 1, divisor = 0;  // of the mean: the rows that are not ignored

  eaves::cross_entropy_shard_forward({.logits = shard.view_of(logits),
                                      .targets = batch.targets_view(),
                                      .options = kOptions,
                                      .first_class = shard.first_class,
                                      .classes = kClasses,
                                      .statistics = view(part.data(), {kRows, kStatistics})},
                                     context);
  communicator.all_gather(rank, part, all);
  eaves::cross_entropy_merge({.statistics = view(all.data(), {ranks, kRows, kStatistics}),
                              .targets = batch.targets_view(),
                              .options = kOptions,
                              .classes = kClasses,
                              .loss = view(&shard.loss, {}),
                              .lse = view(lse.data(), {kRows}),
                              .divisor = view(&divisor, {})},
                             context);
  eaves::cross_entropy_backward({.grad_loss = view(&grad_loss, {}),
                                 .logits = shard.view_of(logits),
                                 .targets = batch.targets_view(),
                                 .options = kOptions,
                                 .lse = view(lse.data(), {kRows}),
                                 .divisor = view(&divisor, {}),
                                 .first_class = shard.first_class,
                                 .classes = kClasses,
                                 .grad_logits = shard.view_of(logits)},  // over them
                                context);
  shard.add_gradients(batch, logits);
  communicator.all_reduce(rank, shard.grad_x);  // grad_head is this rank's own
}

// |actual - expected| / |expected|, of vectors.
double distance(std::span<const float> actual, std::span<const float> expected) {
  double square = 0, expected_square = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    square += std::pow(double{actual[i]} - expected[i], 2);
    expected_square += std::pow(expected[i], 2);
  }
  return std::sqrt(square / expected_square);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  Batch batch;
  Shard whole = {.first_class = 0, .classes = kClasses, .stored = kClasses};
  for (int i = 0; i < kRows * kFeatures; ++i) batch.x.push_back(normal(random));
  for (int row = 0; row < kRows; ++row) batch.targets.push_back(row % 8 == 7 ? -100 : row * 37 % kClasses);
  for (int i = 0; i < kClasses * kFeatures; ++i) whole.head.push_back(0.5f * normal(random));

  // Uneven parts, the last one padded, with numbers that a loss over them would show.
  std::vector<Shard> shards = {{0, 300, 300}, {300, 256, 256}, {556, 300, 300}, {856, 144, 200}};
  const int ranks = static_cast<int>(shards.size());
  for (Shard& shard : shards) {
    const auto first = whole.head.begin() + shard.first_class * kFeatures;
    shard.head.assign(first, first + shard.classes * kFeatures);
    shard.head.resize(shard.stored * kFeatures, 100.0f);
  }
  Communicator communicator(ranks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { run_rank(communicator, rank, ranks, batch, shards[rank]); });
  threads.clear();  // joins them

  std::vector<float> logits = whole.logits_of(batch);
  eaves::cross_entropy_forward_backward({.forward = {.logits = whole.view_of(logits),
                                                     .targets = batch.targets_view(),
                                                     .options = kOptions,
                                                     .loss = view(&whole.loss, {})}});
  whole.add_gradients(batch, logits);

  bool ok = true;
  std::vector<float> grad_head;  // of all ranks, without the padding
  for (const Shard& shard : shards) {
    ok = ok && shard.loss == shards[0].loss && shard.grad_x == shards[0].grad_x;
    grad_head.insert(grad_head.end(), shard.grad_head.begin(), shard.grad_head.begin() + shard.classes * kFeatures);
  }
  const double of_loss = distance({&shards[0].loss, 1}, {&whole.loss, 1});
  const double of_x = distance(shards[0].grad_x, whole.grad_x), of_head = distance(grad_head, whole.grad_head);
  std::printf("loss of %d ranks %.6f, of one %.6f, %s\n", ranks, shards[0].loss, whole.loss,
              ok ? "the same on every rank" : "NOT the same on every rank");
  std::printf("relative distance: loss %.1e, grad_x %.1e, grad_head %.1e\n", of_loss, of_x, of_head);
  // Each number of grad_x is a float32 sum over 1000 classes, and ranks add it up in another order.
  return ok && of_loss <= 2e-6 && of_x <= 2e-6 && of_head <= 2e-6 ? 0 : 1;
}
