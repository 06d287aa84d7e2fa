// Many small objects behind a map: built, walked, changed, looked up. Prints what it saw.
import java.util.*;

public class Maps {
    static final class Entry {
        int id;
        String name;
        double score;
        List<Integer> tags = new ArrayList<>();
    }

    public static void main(String[] arguments) {
        int entries = Integer.parseInt(arguments[0]);
        String[] kinds = {"user", "order", "session", "item"};
        Random random = new Random(7);
        Map<String, Entry> table = new LinkedHashMap<>();
        for (int nth = 0; nth < entries; nth++) {
            Entry entry = new Entry();
            entry.id = nth;
            entry.name = (kinds[nth % 4] + "-" + nth).toUpperCase();
            entry.score = random.nextDouble();
            entry.tags.add(nth % 97);
            table.put(kinds[nth % 4] + "-" + nth, entry);
        }
        for (int turn = 0; turn < 3; turn++) {
            double total = 0;
            for (Entry entry : table.values()) {
                total += entry.score;
                entry.tags.add(turn);
            }
            System.out.println("turn " + turn + " " + table.size() + " " + total);
        }
        long digest = 1;
        for (int nth = 0; nth < entries / 20; nth++) {
            int at = random.nextInt(entries);
            Entry entry = table.get(kinds[at % 4] + "-" + at);
            digest = digest * 31 + entry.name.hashCode() + entry.id + entry.tags.size() + Double.hashCode(entry.score);
        }
        System.out.println(digest);
    }
}
