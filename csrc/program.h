// A recorded model: instructions over float32 buffers, run by one call a step.
//
// The pool is entered once; every thread walks the instructions and takes its share of each. A buffer
// has a fixed width and one row for each token of the step, or one for each row whose logits are needed.
// Everything that a caller hands to `run` is checked before the first thread starts: a step either runs
// whole or throws and has changed nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "thread_pool.h"

namespace outrider {

struct View {  // columns [column, column + width) of a buffer
  int buffer = -1;
  int64_t column = 0, width = 0;
};

struct StepInputs {
  AttentionBatch attention;              // num_rows is the step's number of tokens
  const int32_t* token_ids = nullptr;    // [num_rows]
  const int32_t* logits_indices = nullptr;  // [num_logits] rows, for gathered buffers
  int64_t num_logits = 0;
  const float* hidden = nullptr;  // [num_rows, hidden_width()], for programs that read hidden states
};

struct LinearOptions {
  std::vector<float> norm_weight;  // not empty: RMSNorm of x goes in
  float norm_eps = 0;
  std::vector<float> bias;  // empty: none
  Epilogue epilogue = Epilogue::store;
};

struct AttentionOptions {
  int layer = 0, heads = 0;
  float scale = 0;
  int window = 0;
  std::shared_ptr<const RopeTable> rope;   // null: none
  std::vector<float> q_norm, k_norm;       // empty: none
  float norm_eps = 0;
};

using Weights = std::shared_ptr<const PackedWeight>;

class Program {
 public:
  // `storage_floats`: sizes of the areas that buffers live in. Buffers whose lives do not overlap may
  // share one.
  Program(int64_t max_rows, int64_t max_logits_rows, const std::vector<int64_t>& storage_floats,
          std::shared_ptr<KVCache> cache);
  ~Program();
  Program(const Program&) = delete;

  int add_buffer(int64_t width, int storage, bool gathered);
  float* buffer_data(int buffer) const;
  int64_t buffer_width(int buffer) const;
  int64_t buffer_rows(int buffer) const;  // the most it can hold

  // Instructions, in order. `out` and the inputs are views of buffers with the same kind of rows; where x
  // has a row a token and `out` is gathered, rows are picked by logits_indices.
  void embedding(View out, Weights table);
  void linear(View out, View x, Weights weight, LinearOptions options);
  void rms_norm(View out, View x, std::vector<float> weight, float eps, int heads);
  void layer_norm(View out, View x, std::vector<float> weight, std::vector<float> bias, float eps);
  void rope(View out, View x, std::shared_ptr<const RopeTable> table, int heads);
  void append_attention(View out, View q, View k, View v, AttentionOptions options);
  void append_cache(View k, View v, int layer);  // writes them to the step's slots
  void silu_mul(View out, View gate, View up);
  void gelu_mul(View out, View gate, View up);
  void add(View out, View a, View b);
  void gather_rows(View out, View x);
  void hidden_rows(View out);  // the step's own hidden states

  // Throws std::invalid_argument, naming what is out of range.
  void run(StepInputs inputs);

  // What each instruction took in the last run, if `profile` was set: names and nanoseconds.
  void set_profile(bool on) { profile_ = on; }
  std::vector<std::pair<std::string, int64_t>> profile() const;

  int64_t max_rows() const { return max_rows_; }
  int64_t max_logits_rows() const { return max_logits_rows_; }
  int64_t hidden_width() const { return hidden_width_; }  // of the hidden states that a step must bring, or 0
  int64_t nbytes() const;  // of the buffers, whether touched or not

  struct Instruction;
  struct Step;
  struct Resolved;

 private:
  struct Buffer {
    int64_t width;
    int storage;
    bool gathered;
  };

  Resolved resolve(View view) const;
  void require(bool condition, const char* what) const;
  void check(const StepInputs& inputs) const;
  void check_requests(const AttentionBatch& batch) const;
  void push(std::unique_ptr<Instruction> instruction);
  void reserve_scratch();

  int64_t max_rows_, max_logits_rows_;
  std::vector<int64_t> storage_floats_;
  std::vector<float*> storage_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Instruction>> instructions_;
  std::shared_ptr<KVCache> cache_;
  const PackedWeight** last_linear_ = nullptr;  // where the latest linear wants to know of the next one's weight
  int64_t vocab_size_ = INT64_MAX, max_positions_ = INT64_MAX, max_k_ = 0, hidden_width_ = 0;
  std::unique_ptr<LinearScratch> linear_scratch_;
  AttentionScratch attention_scratch_;
  DraftTrees trees_;  // of the current step
  int scratch_threads_ = 0;
  bool profile_ = false;
  std::vector<int64_t> nanoseconds_;
};

}  // namespace outrider
