// A head whose vocabulary is cut over ranks (tensor parallel), in a trainer with its own communication. Each rank has
// all of hidden and some classes of the head, and sends 10 numbers for each row in place of its logits. The call
// computes chunks of rows, and calls back when ranks have to communicate. Here threads stand for ranks and shared
// memory for NCCL, on the CPU. Prints the loss, and how far it and the gradients are from one rank's results. Returns
// non-zero if the distance exceeds float32 rounding, if ranks differ in a bit, or if padding was written.
#include <eaves/linear_cross_entropy.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace {

using eaves::DType;
using eaves::TensorView;

constexpr int kRanks = 4, kRows = 256, kFeatures = 32, kStatistics = eaves::kCrossEntropyStatistics;
constexpr int kClasses = 1000, kMostClasses = 300;  // the classes of all ranks, the most of one rank

// One rank's part of the head, in which rows behind `classes` are padding, and the results of its step.
struct Rank {
  int first_class, classes, stored;
  std::vector<float> head = std::vector<float>(stored * kFeatures), grad_head = std::vector<float>(head.size());
  std::vector<float> grad_hidden = std::vector<float>(kRows * kFeatures), lse = std::vector<float>(kRows);
  float loss = 0;
  int chunks = 0;

  // The arguments without shards. The views end before the padding, which is therefore neither read nor written.
  eaves::LinearCrossEntropyForwardBackwardArgs step(const float* hidden, const std::int64_t* targets) {
    const eaves::Dims of_hidden = {kRows, kFeatures}, of_head = {classes, kFeatures};
    eaves::LinearCrossEntropyForwardBackwardArgs args;
    args.forward.inputs = {.hidden = TensorView::contiguous(hidden, DType::float32, of_hidden),
                           .head = TensorView::contiguous(head.data(), DType::float32, of_head),
                           .targets = TensorView::contiguous(targets, DType::int64, {kRows}),  // classes of all ranks
                           .options = {.label_smoothing = 0.1, .z_loss_weight = 1e-4}};
    args.forward.outputs = {.loss = TensorView::contiguous(&loss, DType::float32, {}),
                            .lse = TensorView::contiguous(lse.data(), DType::float32, {kRows})};
    args.gradients = {.grad_hidden = TensorView::contiguous(grad_hidden.data(), DType::float32, of_hidden),
                      .grad_head = TensorView::contiguous(grad_head.data(), DType::float32, of_head)};
    return args;
  }
};

// Every rank calls the same functions in the same order. On a GPU the calls of NCCL go to the stream of the
// ExecutionContext, between the kernels that produce their data and the kernels that read it; the host never waits.
class Communicator {
 public:
  // ncclAllGather(part, all, part.size(), ncclFloat, ...): the parts of all ranks, one behind the other.
  void all_gather(int rank, std::span<const float> part, std::span<float> all) {
    parts_[rank] = part;
    barrier_.arrive_and_wait();  // now every rank's part is known
    for (int i = 0; i < kRanks; ++i) std::ranges::copy(parts_[i], all.begin() + i * part.size());
    barrier_.arrive_and_wait();  // until now others may read `part`
  }

  // ncclAllReduce(sum, sum, sum.size(), ncclFloat, ncclSum, ...). Here in rank order: the same bits in every run.
  void all_reduce(int rank, std::span<float> sum) {
    std::vector<float> all(kRanks * sum.size());
    all_gather(rank, sum, all);
    std::ranges::fill(sum, 0.0f);
    for (std::size_t i = 0; i < all.size(); ++i) sum[i % sum.size()] += all[i];
  }

 private:
  std::span<const float> parts_[kRanks];
  std::barrier<> barrier_{kRanks};
};

void run_rank(Communicator& communicator, int index, Rank& rank, eaves::LinearCrossEntropyForwardBackwardArgs args) {
  std::vector<float> statistics(kRows * kStatistics), gathered(kRanks * statistics.size());
  // Like hidden and targets, this limit and most_classes must be the same on all ranks: the chunks follow from them.
  args.forward.inputs.workspace_limit = 128 << 10;
  args.shard = {.first_class = rank.first_class,
                .classes = kClasses,
                .most_classes = kMostClasses,
                .is_for_argmax_or_sum_sq = false,
                .shards = kRanks,
                .statistics = TensorView::contiguous(statistics.data(), DType::float32, {kRows, kStatistics}),
                .gathered = TensorView::contiguous(gathered.data(), DType::float32, {kRanks, kRows, kStatistics})};
  args.shard.gather = [&](std::int64_t first, std::int64_t rows) {
    const std::size_t at = first * kStatistics, count = rows * kStatistics;
    communicator.all_gather(index, {&statistics[at], count}, {&gathered[kRanks * at], kRanks * count});
    ++rank.chunks;
  };
  // No row is ignored here. With ignored rows, `first` and `rows` do not count rows of grad_hidden: reduce all of it
  // after the call.
  args.shard.grad_hidden_is_complete = [&](std::int64_t first, std::int64_t rows) {
    communicator.all_reduce(index, {&rank.grad_hidden[first * kFeatures], static_cast<std::size_t>(rows * kFeatures)});
  };
  linear_cross_entropy_forward_backward(args, {.threads = 1});  // ranks share the cores; on a GPU: .stream
}

// |actual - expected| / |expected| of two vectors.
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
  std::vector<float> hidden(kRows * kFeatures);
  std::vector<std::int64_t> targets(kRows);
  Rank whole = {0, kClasses, kClasses};
  for (float& number : hidden) number = normal(random);
  for (float& number : whole.head) number = 0.5f * normal(random);
  for (int row = 0; row < kRows; ++row) targets[row] = row * 37 % kClasses;
  linear_cross_entropy_forward_backward(whole.step(hidden.data(), targets.data()));

  Rank ranks[kRanks] = {{0, 300, 300}, {300, 256, 256}, {556, 300, 300}, {856, 144, 200}};
  for (Rank& rank : ranks) {
    std::ranges::fill(rank.head, 100.0f);  // padding that would show in a loss over it
    std::copy_n(&whole.head[rank.first_class * kFeatures], rank.classes * kFeatures, rank.head.begin());
  }
  Communicator communicator;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kRanks; ++i)
    threads.emplace_back([&, i] { run_rank(communicator, i, ranks[i], ranks[i].step(hidden.data(), targets.data())); });
  threads.clear();  // joins them

  bool ok = true;
  std::vector<float> grad_head;  // all ranks' parts without the padding
  for (const Rank& rank : ranks) {
    const auto padding = rank.grad_head.begin() + rank.classes * kFeatures;
    ok = ok && rank.loss == ranks[0].loss && rank.grad_hidden == ranks[0].grad_hidden;
    ok = ok && std::all_of(padding, rank.grad_head.end(), [](float number) { return number == 0; });
    grad_head.insert(grad_head.end(), rank.grad_head.begin(), padding);
  }
  const double of_loss = distance({&ranks[0].loss, 1}, {&whole.loss, 1});
  const double of_hidden = distance(ranks[0].grad_hidden, whole.grad_hidden),
               of_head = distance(grad_head, whole.grad_head);
  std::printf("loss of %d ranks in %d chunks %.6f, of one rank %.6f, %s\n", kRanks, ranks[0].chunks, ranks[0].loss,
              whole.loss, ok ? "the same on every rank" : "NOT the same on every rank, or padding was written");
  std::printf("relative distance: loss %.1e, grad_hidden %.1e, grad_head %.1e\n", of_loss, of_hidden, of_head);
  // Each number of grad_hidden is a float32 sum over 1000 classes, and ranks add it up in another order.
  return ok && of_loss <= 2e-6 && of_hidden <= 2e-6 && of_head <= 2e-6 ? 0 : 1;
}
