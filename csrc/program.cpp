// The instructions of a program, the checks when one is added, and those of each step.
#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "elementwise.h"

namespace outrider {

// A view with its address.
struct Program::Resolved {
  Rows rows;
  int64_t width = 0;
  bool gathered = false;
};

// What the instructions of one step share.
struct Program::Step {
  const StepInputs& in;
  LinearScratch& linear_scratch;
  AttentionScratch& attention_scratch;
  int64_t rows(const Resolved& view) const { return view.gathered ? in.num_logits : in.attention.num_rows; }
};

struct Program::Instruction {
  virtual ~Instruction() = default;
  virtual const char* name() const = 0;
  virtual void run(Team& team, const Step& step) const = 0;  // collective
};

namespace {

using Step = Program::Step;
using Resolved = Program::Resolved;

const float* or_null(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

struct Embedding : Program::Instruction {
  Resolved out;
  Weights table;
  const char* name() const override { return "embedding"; }
  void run(Team& team, const Step& step) const override {
    outrider::embedding(team, *table, step.in.token_ids, step.in.attention.num_rows, out.rows);
  }
};

struct Linear : Program::Instruction {
  Resolved out, x;
  Weights weight;
  LinearOptions options;
  LinearArgs fixed;  // all but the rows; `next` comes with the next linear
  const char* name() const override { return "linear"; }

  void fix() {
    fixed.weight = weight.get();
    fixed.x = x.rows.data, fixed.x_stride = x.rows.stride;
    fixed.norm_weight = or_null(options.norm_weight);
    fixed.norm_eps = options.norm_eps;
    fixed.bias = or_null(options.bias);
    fixed.epilogue = options.epilogue;
    fixed.out = out.rows.data, fixed.out_stride = out.rows.stride;
    check_linear(fixed);
  }

  void run(Team& team, const Step& step) const override {
    LinearArgs args = fixed;
    args.rows = step.rows(out);
    if (out.gathered && !x.gathered) args.row_index = step.in.logits_indices;
    if (args.rows > 0) outrider::linear(team, args, step.linear_scratch);
  }
};

struct RmsNorm : Program::Instruction {
  Resolved out, x;
  std::vector<float> weight;
  float eps;
  int heads;
  const char* name() const override { return "rms_norm"; }
  void run(Team& team, const Step& step) const override {
    outrider::rms_norm(team, x.rows, weight.data(), eps, step.rows(out), heads, x.width / heads, out.rows);
  }
};

struct LayerNorm : Program::Instruction {
  Resolved out, x;
  std::vector<float> weight, bias;
  float eps;
  const char* name() const override { return "layer_norm"; }
  void run(Team& team, const Step& step) const override {
    outrider::layer_norm(team, x.rows, weight.data(), or_null(bias), eps, step.rows(out), x.width, out.rows);
  }
};

struct Rope : Program::Instruction {
  Resolved out, x;
  std::shared_ptr<const RopeTable> table;
  int heads;
  const char* name() const override { return "rope"; }
  void run(Team& team, const Step& step) const override {
    const AttentionBatch& batch = step.in.attention;
    outrider::rope(team, x.rows, *table, batch.positions, batch.num_rows, heads, x.width / heads, out.rows);
  }
};

struct Attention : Program::Instruction {
  AttentionOptions options;
  AttentionArgs args;
  const char* name() const override { return "append_attention"; }
  void run(Team& team, const Step& step) const override {
    outrider::append_attention(team, step.in.attention, args, step.attention_scratch);
  }
};

struct AppendCache : Program::Instruction {
  AttentionArgs args;
  const char* name() const override { return "append_cache"; }
  void run(Team& team, const Step& step) const override { outrider::append_cache(team, step.in.attention, args); }
};

struct Binary : Program::Instruction {
  using Fn = void (*)(Team&, Rows, Rows, int64_t, int64_t, Rows);
  const char* label;
  Fn fn;
  Resolved out, a, b;
  const char* name() const override { return label; }
  void run(Team& team, const Step& step) const override {
    fn(team, a.rows, b.rows, step.rows(out), out.width, out.rows);
  }
};

struct Gather : Program::Instruction {
  Resolved out, x;
  const char* name() const override { return "gather_rows"; }
  void run(Team& team, const Step& step) const override {
    outrider::gather_rows(team, x.rows, step.in.logits_indices, step.in.num_logits, x.width, out.rows);
  }
};

struct HiddenRows : Program::Instruction {
  Resolved out;
  const char* name() const override { return "hidden_rows"; }
  void run(Team& team, const Step& step) const override {
    const float* hidden = step.in.hidden;
    team.for_each(step.in.attention.num_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::copy_n(hidden + r * out.width, out.width, out.rows.row(r));
    });
  }
};

std::string range_error(const char* what, int64_t index, int64_t value, int64_t limit) {
  return std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) +
         ", must be between 0 and " + std::to_string(limit - 1);
}

void check_range(const char* what, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) throw std::invalid_argument(range_error(what, i, values[i], limit));
}

void check_size(const char* what, int64_t size, int64_t low, int64_t high) {
  if (size < low || size > high)
    throw std::invalid_argument("a step of " + std::to_string(size) + " " + what + ": this program takes " +
                                std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

Program::Program(int64_t max_rows, int64_t max_logits_rows, const std::vector<int64_t>& storage_floats,
                 std::shared_ptr<KVCache> cache)
    : max_rows_(max_rows), max_logits_rows_(max_logits_rows), storage_floats_(storage_floats), cache_(std::move(cache)) {
  require(max_rows > 0 && max_logits_rows > 0, "max_rows and max_logits_rows must be positive");
  for (int64_t floats : storage_floats) {
    require(floats > 0, "storage must be positive");
    // Not touched here: what no step needs costs no memory.
    void* area = std::aligned_alloc(64, (size_t(floats) * sizeof(float) + 63) / 64 * 64);
    if (!area) throw std::bad_alloc();
    storage_.push_back(static_cast<float*>(area));
  }
}

Program::~Program() {
  for (float* area : storage_) std::free(area);
}

void Program::require(bool condition, const char* what) const {
  if (!condition) throw std::invalid_argument(std::string("program: ") + what);
}

int Program::add_buffer(int64_t width, int storage, bool gathered) {
  require(storage >= 0 && size_t(storage) < storage_.size(), "no such storage");
  const int64_t rows = gathered ? max_logits_rows_ : max_rows_;
  require(width > 0 && width * rows <= storage_floats_[size_t(storage)], "buffer does not fit its storage");
  buffers_.push_back({width, storage, gathered});
  return int(buffers_.size()) - 1;
}

float* Program::buffer_data(int buffer) const { return resolve({buffer, 0, 1}).rows.data; }
int64_t Program::buffer_width(int buffer) const { return resolve({buffer, 0, 1}).rows.stride; }
int64_t Program::buffer_rows(int buffer) const {
  return resolve({buffer, 0, 1}).gathered ? max_logits_rows_ : max_rows_;
}

Program::Resolved Program::resolve(View view) const {
  require(view.buffer >= 0 && size_t(view.buffer) < buffers_.size(), "no such buffer");
  const Buffer& buffer = buffers_[size_t(view.buffer)];
  require(view.column >= 0 && view.width > 0 && view.column + view.width <= buffer.width, "view outside its buffer");
  return {{storage_[size_t(buffer.storage)] + view.column, buffer.width}, view.width, buffer.gathered};
}

void Program::push(std::unique_ptr<Instruction> instruction) {
  instructions_.push_back(std::move(instruction));
  nanoseconds_.push_back(0);
}

void Program::embedding(View out, Weights table) {
  auto op = std::make_unique<Embedding>();
  op->out = resolve(out);
  require(table && table->k() == out.width && !op->out.gathered, "embedding: shapes do not fit");
  vocab_size_ = std::min(vocab_size_, table->n());
  op->table = std::move(table);
  push(std::move(op));
}

void Program::linear(View out, View x, Weights weight, LinearOptions options) {
  auto op = std::make_unique<Linear>();
  op->out = resolve(out);
  op->x = resolve(x);
  require(weight != nullptr, "linear: no weight");
  const bool halves = options.epilogue == Epilogue::silu_mul || options.epilogue == Epilogue::gelu_mul;
  require(x.width == weight->k() && out.width * (halves ? 2 : 1) == weight->n(), "linear: shapes do not fit");
  require(options.norm_weight.empty() || int64_t(options.norm_weight.size()) == x.width, "linear: norm weight size");
  require(options.bias.empty() || int64_t(options.bias.size()) == weight->n(), "linear: bias size");
  require(op->out.gathered || !op->x.gathered, "linear: gathered rows cannot be scattered");
  max_k_ = std::max(max_k_, weight->k());
  op->weight = std::move(weight);
  op->options = std::move(options);
  op->fix();
  if (last_linear_) *last_linear_ = op->weight.get();
  last_linear_ = &op->fixed.next;
  push(std::move(op));
}

void Program::rms_norm(View out, View x, std::vector<float> weight, float eps, int heads) {
  auto op = std::make_unique<RmsNorm>();
  op->out = resolve(out);
  op->x = resolve(x);
  require(heads > 0 && out.width == x.width && x.width == int64_t(weight.size()) * heads, "rms_norm: shapes do not fit");
  require(op->out.gathered == op->x.gathered, "rms_norm: kinds of rows differ");
  op->weight = std::move(weight);
  op->eps = eps;
  op->heads = heads;
  push(std::move(op));
}

void Program::layer_norm(View out, View x, std::vector<float> weight, std::vector<float> bias, float eps) {
  auto op = std::make_unique<LayerNorm>();
  op->out = resolve(out);
  op->x = resolve(x);
  require(out.width == x.width && x.width == int64_t(weight.size()), "layer_norm: shapes do not fit");
  require(bias.empty() || bias.size() == weight.size(), "layer_norm: bias size");
  require(op->out.gathered == op->x.gathered, "layer_norm: kinds of rows differ");
  op->weight = std::move(weight);
  op->bias = std::move(bias);
  op->eps = eps;
  push(std::move(op));
}

void Program::rope(View out, View x, std::shared_ptr<const RopeTable> table, int heads) {
  auto op = std::make_unique<Rope>();
  op->out = resolve(out);
  op->x = resolve(x);
  require(table && heads > 0 && out.width == x.width && x.width % heads == 0 && x.width / heads >= table->rotary_dim,
          "rope: shapes do not fit");
  require(!op->out.gathered && !op->x.gathered, "rope: rows must be the step's tokens");
  max_positions_ = std::min(max_positions_, table->max_position);
  op->table = std::move(table);
  op->heads = heads;
  push(std::move(op));
}

void Program::append_attention(View out, View q, View k, View v, AttentionOptions options) {
  require(cache_ != nullptr, "append_attention: the program has no cache");
  const int64_t head_dim = cache_->head_dim, kv_width = head_dim * cache_->kv_heads;
  require(options.heads > 0 && options.heads % cache_->kv_heads == 0 && q.width == head_dim * options.heads &&
              out.width == q.width && k.width == kv_width && v.width == kv_width,
          "append_attention: shapes do not fit the cache");
  require(options.layer >= 0 && options.layer < cache_->num_layers, "append_attention: no such layer");
  require(options.q_norm.empty() || int64_t(options.q_norm.size()) == head_dim, "append_attention: q_norm size");
  require(options.k_norm.empty() || int64_t(options.k_norm.size()) == head_dim, "append_attention: k_norm size");
  auto op = std::make_unique<Attention>();
  op->options = std::move(options);
  const Resolved o = resolve(out), rq = resolve(q), rk = resolve(k), rv = resolve(v);
  require(!o.gathered && !rq.gathered && !rk.gathered && !rv.gathered, "append_attention: rows must be the step's tokens");
  AttentionArgs& args = op->args;
  args.q = rq.rows.data, args.q_stride = rq.rows.stride;
  args.k = rk.rows.data, args.k_stride = rk.rows.stride;
  args.v = rv.rows.data, args.v_stride = rv.rows.stride;
  args.out = o.rows.data, args.out_stride = o.rows.stride;
  args.heads = op->options.heads;
  args.cache = cache_.get();
  args.layer = op->options.layer;
  args.scale = op->options.scale;
  args.window = op->options.window;
  args.rope = op->options.rope.get();
  args.q_norm = or_null(op->options.q_norm);
  args.k_norm = or_null(op->options.k_norm);
  args.norm_eps = op->options.norm_eps;
  check_attention(args);
  if (args.rope) max_positions_ = std::min(max_positions_, args.rope->max_position);
  push(std::move(op));
}

void Program::append_cache(View k, View v, int layer) {
  require(cache_ != nullptr, "append_cache: the program has no cache");
  const int64_t kv_width = int64_t(cache_->head_dim) * cache_->kv_heads;
  const Resolved rk = resolve(k), rv = resolve(v);
  require(k.width == kv_width && v.width == kv_width && !rk.gathered && !rv.gathered,
          "append_cache: shapes do not fit the cache");
  require(layer >= 0 && layer < cache_->num_layers, "append_cache: no such layer");
  auto op = std::make_unique<AppendCache>();
  op->args.k = rk.rows.data, op->args.k_stride = rk.rows.stride;
  op->args.v = rv.rows.data, op->args.v_stride = rv.rows.stride;
  op->args.heads = cache_->kv_heads;
  op->args.cache = cache_.get();
  op->args.layer = layer;
  push(std::move(op));
}

static std::unique_ptr<Binary> make_binary(const char* label, Binary::Fn fn, Resolved out, Resolved a, Resolved b) {
  if (out.width != a.width || out.width != b.width || out.gathered != a.gathered || out.gathered != b.gathered)
    throw std::invalid_argument(std::string("program: ") + label + ": shapes do not fit");
  auto op = std::make_unique<Binary>();
  op->label = label, op->fn = fn;
  op->out = out, op->a = a, op->b = b;
  return op;
}

void Program::silu_mul(View out, View gate, View up) {
  push(make_binary("silu_mul", outrider::silu_mul, resolve(out), resolve(gate), resolve(up)));
}
void Program::gelu_mul(View out, View gate, View up) {
  push(make_binary("gelu_mul", outrider::gelu_mul, resolve(out), resolve(gate), resolve(up)));
}
void Program::add(View out, View a, View b) {
  push(make_binary("add", outrider::add, resolve(out), resolve(a), resolve(b)));
}

void Program::gather_rows(View out, View x) {
  auto op = std::make_unique<Gather>();
  op->out = resolve(out);
  op->x = resolve(x);
  require(op->out.gathered && !op->x.gathered && out.width == x.width, "gather_rows: shapes do not fit");
  push(std::move(op));
}

void Program::hidden_rows(View out) {
  auto op = std::make_unique<HiddenRows>();
  op->out = resolve(out);
  require(!op->out.gathered && (hidden_width_ == 0 || hidden_width_ == out.width), "hidden_rows: shapes do not fit");
  hidden_width_ = out.width;
  push(std::move(op));
}

void Program::check(const StepInputs& in) const {
  const AttentionBatch& batch = in.attention;
  check_size("tokens", batch.num_rows, 1, max_rows_);
  check_size("logits rows", in.num_logits, 0, max_logits_rows_);
  if (hidden_width_ > 0 && !in.hidden) throw std::invalid_argument("this program needs hidden states");
  check_range("token_ids", in.token_ids, batch.num_rows, vocab_size_);
  check_range("positions", batch.positions, batch.num_rows, max_positions_);
  check_range("logits_indices", in.logits_indices, in.num_logits, batch.num_rows);
  check_requests(batch);
}

void Program::check_requests(const AttentionBatch& batch) const {
  const int32_t* start = batch.query_start_loc;
  if (batch.num_requests < 1 || start[0] != 0 || start[batch.num_requests] != batch.num_rows)
    throw std::invalid_argument("query_start_loc must rise from 0 to the number of tokens, " +
                                std::to_string(batch.num_rows));
  const int64_t block_size = cache_ ? cache_->block_size : 1, num_blocks = cache_ ? cache_->num_blocks : 0;
  if (cache_) check_range("slot_mapping", batch.slot_mapping, batch.num_rows, num_blocks * block_size);
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    if (start[b + 1] < start[b] || start[b + 1] > batch.num_rows)
      throw std::invalid_argument("query_start_loc must rise from 0 to the number of tokens, " +
                                  std::to_string(batch.num_rows));
    const int64_t length = batch.seq_lens[b];
    if (length < 0 || (cache_ && length > batch.max_blocks * block_size))
      throw std::invalid_argument(range_error("seq_lens", b, length, batch.max_blocks * block_size + 1));
    for (int64_t r = start[b]; r < start[b + 1]; ++r)
      if (batch.positions[r] >= length) throw std::invalid_argument(range_error("positions", r, batch.positions[r], length));
    if (cache_)
      check_range("block_tables", batch.block_tables + b * batch.max_blocks, (length + block_size - 1) / block_size,
                  num_blocks);
  }
  if (batch.parents) check_parents(batch);
}

// The scratch of linear depends on the number of threads, which may change between steps.
void Program::reserve_scratch() {
  const int threads = ThreadPool::global().size();
  if (threads == scratch_threads_) return;
  linear_scratch_ = std::make_unique<LinearScratch>();
  linear_scratch_->reserve(max_rows_, max_k_, threads);
  scratch_threads_ = threads;
}

void Program::run(StepInputs inputs) {
  check(inputs);
  reserve_scratch();
  if (inputs.attention.parents && cache_ && trees_.index(inputs.attention, cache_->block_size))
    inputs.attention.trees = &trees_;
  const Step step{inputs, *linear_scratch_, attention_scratch_};
  run_team([&](Team& team) {
    if (!profile_ || team.rank() != 0) {
      for (const auto& instruction : instructions_) instruction->run(team, step);
      return;
    }
    auto before = std::chrono::steady_clock::now();
    for (size_t i = 0; i < instructions_.size(); ++i) {
      instructions_[i]->run(team, step);
      const auto now = std::chrono::steady_clock::now();
      nanoseconds_[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(now - before).count();
      before = now;
    }
  });
}

std::vector<std::pair<std::string, int64_t>> Program::profile() const {
  std::vector<std::pair<std::string, int64_t>> result;
  for (size_t i = 0; i < instructions_.size(); ++i) result.emplace_back(instructions_[i]->name(), nanoseconds_[i]);
  return result;
}

int64_t Program::nbytes() const {
  int64_t floats = 0;
  for (int64_t area : storage_floats_) floats += area;
  return floats * int64_t(sizeof(float));
}

}  // namespace outrider
