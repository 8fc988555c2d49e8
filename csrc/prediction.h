// Where in a predicted text is the output by now?
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outrider {

// Follows an output along a prediction of it. While they agree the place moves on token by token. After a
// difference the place is searched again: the prediction's tokens that best continue the end of the output, by
// length of agreement, then nearest to where the output was expected to be.
class Prediction {
 public:
  explicit Prediction(std::vector<int32_t> token_ids);

  // Final tokens of the output, in order.
  void append(const int32_t* token_ids, size_t count);
  // The predicted tokens from here on, for an output that goes on with `after`; `agreed` is how many tokens before
  // them agree with the output: kBeginning at the very start, 0 for a guess across a difference.
  void propose(const std::vector<int32_t>& after, int limit, std::vector<int32_t>& draft, int& agreed) const;

  size_t size() const { return tokens_.size(); }
  size_t output_size() const { return recent_.size() + num_old_; }
  size_t memory_bytes() const;

  static constexpr int kBeginning = 64;     // nothing has been written: as good as the best agreement
  static constexpr int kMostAgreement = 32;  // tokens that are compared

 private:
  struct Place {
    size_t next = 0;   // the prediction's token that is expected next
    int agreed = 0;
  };

  static void advance(const Prediction& of, std::vector<int32_t>& recent, Place& place, int32_t token);
  Place search(const std::vector<int32_t>& recent, size_t expected) const;
  int agreement(const std::vector<int32_t>& recent, size_t next) const;

  std::vector<int32_t> tokens_;
  std::vector<int32_t> order_;   // places in tokens_, by token, then place
  std::vector<int32_t> recent_;  // the end of the output
  size_t num_old_ = 0;           // tokens of the output before those
  Place place_;
};

}  // namespace outrider
